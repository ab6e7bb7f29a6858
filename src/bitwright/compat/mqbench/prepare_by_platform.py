"""``prepare_by_platform``: MQBench's way to prepare a model for a target."""

from typing import Any

from torch import nn

from bitwright.compat.mqbench.backend_type import BackendType
from bitwright.compat.mqbench.fuse import fuse_chains
from bitwright.compat.mqbench.learned import start_learning
from bitwright.compat.mqbench.nn.frozen import freeze_norms
from bitwright.compat.mqbench.translate import ExtraConfig, read_config
from bitwright.compat.pending import keep_modes, postpone
from bitwright.errors import ConfigError, UnknownNameError, suggest
from bitwright.graph import Inputs
from bitwright.nn.registry import serving
from bitwright.prepare import check_wishes, prepare
from bitwright.prepare.ledger import is_prepared


def prepare_by_platform(
    model: nn.Module,
    deploy_backend: BackendType | str,
    prepare_custom_config_dict: dict[str, Any] | None = None,
    custom_tracer: Any = None,
    is_qat: bool = True,
    freeze_bn: bool = True,
    *,
    example_inputs: Any = None,
) -> nn.Module:
    """Prepare a model for a target, as MQBench did.

    Args:
        model: the float model; it is left untouched.
        deploy_backend: the target, a ``BackendType`` or its name.
        prepare_custom_config_dict: the ``extra_config``: ``extra_qconfig_dict``, ``extra_quantizer_dict``,
            ``preserve_attr``, ``extra_fuse_dict``, ``concrete_args`` and ``leaf_module``.
        custom_tracer: an ``fx.Tracer``; the modules that its ``is_leaf_module`` names are not looked into.
        is_qat: keep the modes of the model; False returns it in eval mode.
        freeze_bn: let BatchNorms use their running statistics in training, too.
        example_inputs: a tensor, a tuple of arguments or a dict of keyword arguments. Without, the model is prepared
            when it is first called, with the inputs of that call; what depends on its graph is refused then.

    Returns:
        The prepared model, all quantizers off; ``enable_calibration`` and ``enable_quantization`` switch them.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    if is_prepared(model):
        raise ConfigError("this model is prepared already; prepare the float model it was made from")
    config = read_config(deploy_backend, prepare_custom_config_dict)
    check_wishes(None, config.recipe, None, None, ())
    options: dict[str, Any] = {
        "leaves": _leaves(model, config, custom_tracer),
        "preserve_attr": config.preserve_attr,
        "concrete_args": config.concrete_args,
    }
    _check_names(model, config)

    def finish(model: nn.Module, inputs: Inputs) -> nn.Module:
        whole = fuse_chains(model, inputs, config.fusions, config.folds_norms)
        with serving(config.modules):
            made = prepare(whole, inputs, recipe=config.recipe, **{k: v for k, v in options.items() if v})
        start_learning(made, inputs)
        keep_modes(made, whole)
        if freeze_bn:
            freeze_norms(made)
        return made if is_qat else made.eval()

    return postpone(model, finish) if example_inputs is None else finish(model, Inputs.of(example_inputs))


def _leaves(model: nn.Module, config: ExtraConfig, tracer: Any) -> list[str]:
    """Names of the modules that are not looked into."""
    named = [(name, module) for name, module in model.named_modules() if name]
    found = [name for name, module in named if isinstance(module, tuple(config.leaves))]
    for cls in config.leaves:
        if not any(isinstance(module, cls) for _, module in named):
            raise UnknownNameError(
                f"leaf_module: the model has no {cls.__name__}"
                f"{suggest(cls.__name__, {type(module).__name__ for _, module in named})}"
            )
    if tracer is not None:
        asks = getattr(tracer, "is_leaf_module", None)
        if asks is None:
            raise ConfigError(f"custom_tracer must be an fx.Tracer with is_leaf_module, not {tracer!r}")
        found += [name for name, module in named if any(module.children()) and asks(module, name)]
    return list(dict.fromkeys(found))


def _check_names(model: nn.Module, config: ExtraConfig) -> None:
    """Refuse now names of modules and attributes that the model does not have."""
    modules = dict(model.named_modules(remove_duplicate=False))
    lost = [r.match for r in config.recipe.rules if r.skip and ":" not in r.match and r.match not in modules]
    if lost:
        lines = (f"the model has no module {name!r}{suggest(name, [m for m in modules if m])}" for name in lost)
        raise UnknownNameError("exclude_module_name: " + "; ".join(lines))
    for path, names in config.preserve_attr.items():
        if path not in modules:
            raise UnknownNameError(f"preserve_attr: the model has no module {path!r}{suggest(path, modules)}")
        for name in names:
            if not hasattr(modules[path], name):
                known = [n for n in dir(modules[path]) if not n.startswith("_")]
                title = repr(path) if path else "the model"
                raise UnknownNameError(f"preserve_attr: {title} has no attribute {name!r}{suggest(name, known)}")
