"""``prepare_by_platform``: MQBench's way to prepare a model for a target."""

from typing import Any

from torch import nn

from bitwright.compat.keys import check_names
from bitwright.compat.mqbench.backend_type import BackendType
from bitwright.compat.mqbench.fake_quantize import as_mqbench
from bitwright.compat.mqbench.fuse import fuse_chains
from bitwright.compat.mqbench.learned import start_learning
from bitwright.compat.mqbench.nn.frozen import freeze_norms
from bitwright.compat.mqbench.translate import read_config
from bitwright.compat.pending import keep_modes, postpone
from bitwright.compat.refused import refuse
from bitwright.errors import ConfigError
from bitwright.graph import Inputs, check_attributes
from bitwright.graph.capture.leaves import find_leaves
from bitwright.nn.registry import serving
from bitwright.preparation import prepare, resolve_recipe
from bitwright.preparation.ledger import is_prepared


def prepare_by_platform(
    model: nn.Module,
    deploy_backend: BackendType | str,
    prepare_custom_config_dict: dict[str, Any] | None = None,
    custom_tracer: object = None,
    is_qat: bool = True,
    freeze_bn: bool = True,
    *,
    example_inputs: object = None,
) -> nn.Module:
    """Prepare a model for a target, as MQBench did.

    Args:
        model: the float model; it is left untouched.
        deploy_backend: the target, a ``BackendType`` or its name.
        prepare_custom_config_dict: the ``extra_config``: ``extra_qconfig_dict``, ``extra_quantizer_dict``,
            ``preserve_attr``, ``extra_fuse_dict``, ``concrete_args`` and ``leaf_module``.
        custom_tracer: an ``fx.Tracer``; the modules that its ``is_leaf_module`` names are not looked into.
        is_qat: keep the modes of the model; False returns it in eval mode.
        freeze_bn: make BatchNorms use their running statistics in training, too.
        example_inputs: a tensor, a tuple of arguments or a dict of keyword arguments. Without them, inputs that the
            model accepts are searched for. If none are found, it is prepared at its first call, with the inputs of that
            call; until then, anything that depends on its graph or on all its Parameters is refused.

    Returns:
        The prepared model, all quantizers off; ``enable_calibration`` and ``enable_quantization`` switch them.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    if is_prepared(model):
        raise ConfigError("this model is prepared already; prepare the float model it was made from")
    config = read_config(deploy_backend, prepare_custom_config_dict)
    resolve_recipe(None, config.recipe, None, None, ())
    leaves = _opaque(model, custom_tracer)
    find_leaves(model, config.recipe.leaves)
    check_attributes(model, config.preserve_attr)
    excluded = [rule.match for rule in config.recipe.rules if rule.skip and ":" not in rule.match]
    check_names("exclude_module_name", excluded, dict(model.named_modules(remove_duplicate=False)))

    def finish(model: nn.Module, inputs: Inputs) -> nn.Module:
        fixed = config.concrete_args
        whole = fuse_chains(model, inputs, config.fusions, config.folds_norms, concrete_args=fixed)
        with serving(config.modules):
            made = prepare(whole, inputs, recipe=config.recipe, leaves=leaves, concrete_args=fixed)
        as_mqbench(made)
        start_learning(made, inputs)
        keep_modes(made, whole)
        if freeze_bn:
            freeze_norms(made)
        return made if is_qat else made.eval()

    return postpone(model, finish) if example_inputs is None else finish(model, Inputs.of(example_inputs))


prepare_qat_fx_by_platform = prepare_by_platform  # its first name


def _opaque(model: nn.Module, tracer: object) -> list[str]:
    """Names of the modules that a user's tracer does not look into."""
    if tracer is None:
        return []
    asks = getattr(tracer, "is_leaf_module", None)
    if asks is None:
        raise ConfigError(f"custom_tracer must be an fx.Tracer with is_leaf_module, not {tracer!r}")
    return [name for name, module in model.named_modules() if name and any(module.children()) and asks(module, name)]


_BACKENDS = "see bitwright.backends.BACKENDS, and docs/how-to/custom-backend.md to write one"
__getattr__ = refuse(
    __name__,
    {
        "ParamsTable": _BACKENDS,
        "ParamsTable_Lattice": _BACKENDS,
        "get_qconfig_by_platform": f"a backend and a recipe say what a QConfig did; {_BACKENDS}",
        "ObserverDict": "see bitwright.observers.OBSERVERS; register_observer adds one",
        "FakeQuantizeDict": "see bitwright.methods.METHODS; register_method adds one",
        "CustomedTracer": "name leaf_module in the extra_config",
    },
)
