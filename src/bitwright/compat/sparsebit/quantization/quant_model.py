"""QuantModel: Sparsebit's wrapper around a model: calibrate in steps, quantize, train, export."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.compat import stepwise
from bitwright.compat.file_options import add_bits, shapes_of
from bitwright.compat.node_by_node import calibrate_on_quantized, layer_errors
from bitwright.compat.pending import is_pending, postpone, when_prepared
from bitwright.compat.sparsebit.quantization.quant_config import parse_qconfig
from bitwright.compat.sparsebit.specific import check_patterns
from bitwright.compat.sparsebit.translate import to_recipe
from bitwright.errors import CalibrationError, ConfigError
from bitwright.exporting import export
from bitwright.graph import Inputs
from bitwright.graph.capture.leaves import find_leaves
from bitwright.nn.fold import NORMS
from bitwright.nn.norm import freeze_batchnorm, unfreeze_batchnorm
from bitwright.preparation import ledger_of, prepare


class QuantModel(nn.Module):
    """A model, quantized as a Sparsebit config says.

    ::

        qmodel = QuantModel(model, parse_qconfig("qconfig.yaml"))
        qmodel.prepare_calibration()
        for images, _ in loader:
            qmodel(images)
        qmodel.calc_qparams()
        qmodel.set_quant(w_quant=True, a_quant=True)

    Args:
        model: the float model; it is left untouched.
        config: what ``parse_qconfig`` returned, or what it reads.
        example_inputs: a tensor, a tuple or a dict as for ``bw.prepare``. Without them, inputs that the
            model accepts are searched for; if none are found, it is captured at its first call.

    Attributes:
        model: the prepared model, for everything else that Bitwright does with one.
    """

    def __init__(self, model: nn.Module, config: str | Path | Mapping[str, Any], example_inputs: object = None) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise ConfigError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
        self.cfg = parse_qconfig(config)
        self.recipe, self.notes = to_recipe(self.cfg)
        self._batches: list[Inputs] | None = None
        find_leaves(model, self.recipe.leaves)

        def finish(model: nn.Module, inputs: Inputs) -> nn.Module:
            made = prepare(model, inputs, recipe=self.recipe)
            check_patterns(self.cfg, [entry.name for entry in ledger_of(made).entries])
            return made

        if example_inputs is None:
            self.model = postpone(model, finish)
        else:
            self.model = finish(model, Inputs.of(example_inputs))
        if self.cfg.DEVICE:
            self.to(self.cfg.DEVICE)

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Run the model; between ``prepare_calibration`` and ``calc_qparams`` the inputs are kept."""
        if self._batches is not None:
            self._batches.append(Inputs(args, kwargs))
        return self.model(*args, **kwargs)

    def prepare_calibration(self) -> None:
        """From now on, observe the data that runs through the model, which computes in float."""
        self.eval()
        self._batches = []
        when_prepared(self.model, lambda m: stepwise.watch(m, stepwise.all_quantizers(m)))

    def calc_qparams(self, asym: bool = False, w_quant: bool | None = None, a_quant: bool | None = None) -> None:
        """Turn what was seen into scales and zero points; nothing is quantized yet.

        Args:
            asym: find the range of each layer while the layers before it are quantized.
            w_quant: quantize weights meanwhile; by default as ``asym`` says.
            a_quant: quantize activations meanwhile; by default as ``asym`` says.
        """
        if not self._batches:
            raise CalibrationError("there is no calibration data: call prepare_calibration() and run the model on some")
        batches, self._batches = self._batches, None
        stepwise.fix_ranges(self.model)
        weights, activations = (asym if wish is None else wish for wish in (w_quant, a_quant))
        if asym:
            calibrate_on_quantized(self.model, batches, weights, activations)
        self.set_quant(w_quant=False, a_quant=False)

    def init_QAT(self) -> None:
        """Finish the calibration and quantize everything: ready to train."""
        self.calc_qparams()
        self.set_quant(w_quant=True, a_quant=True)

    def set_quant(self, w_quant: bool = False, a_quant: bool = False) -> None:
        """Quantize weights, activations, both or neither."""
        if is_pending(self.model):
            raise CalibrationError("the model has not been run yet: call prepare_calibration() and run it on some data")
        for part, on in zip(stepwise.split_quantizers(self.model), (w_quant, a_quant), strict=True):
            if on:
                stepwise.quantize(self.model, part.values())
            else:
                stepwise.stop(part.values())

    def get_quantization_error(
        self, data: object, checker: Callable[[Tensor, Tensor], Any] = F.mse_loss, is_async: bool = True
    ) -> dict[str, Any]:
        """How far the result of each quantized layer is from the float one.

        Args:
            data: inputs of the model.
            checker: measures how far apart two tensors are.
            is_async: quantize each layer alone; otherwise also all before it.
        """
        return layer_errors(self.model, Inputs.of(data), checker, is_async)

    def export_onnx(
        self,
        dummy_data: object,
        name: str | Path,
        input_names: list[str] | None = None,
        output_names: list[str] | None = None,
        dynamic_axes: object = None,
        opset_version: int = 21,
        verbose: bool = False,
        extra_info: bool = False,
    ) -> Path:
        """Write the quantized model as an ONNX file with QuantizeLinear and DequantizeLinear.

        Args:
            dummy_data: inputs to export with.
            name: the path of the file.
            input_names: names of the inputs in the file; by default those of the model's arguments.
            output_names: names of the outputs in the file.
            dynamic_axes: axes that may vary, as for ``torch.onnx.export``; none fixes all sizes.
            opset_version: at most 21; the file uses the lowest that can express the model.
            verbose: without effect.
            extra_info: also write ``<name>_extra.onnx``, whose quantizing nodes have their ``bits`` in their metadata.
        """
        if opset_version > 21:
            raise ConfigError(f"opset_version must be at most 21, not {opset_version}")
        with self._quantizing():
            shapes = shapes_of(self.model, Inputs.of(dummy_data), dynamic_axes, input_names)
            names = {"input_names": input_names or None, "output_names": output_names or None}
            exported = export(self.model, name, dummy_data, dynamic_shapes=shapes, **names)
        path = exported.path
        if extra_info:
            add_bits(path, path.with_name(f"{path.stem}_extra{path.suffix}"), exported.record)
        return path

    @contextmanager
    def batchnorm_tuning(self) -> Iterator[None]:
        """Estimate the statistics of BatchNorms again from the data that is run through the model meanwhile."""
        norms = [m for m in self.model.modules() if isinstance(m, NORMS) and m.running_mean is not None]
        before = [(norm, norm.momentum, norm.training) for norm in norms]
        unfreeze_batchnorm(self.model)
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean over all batches
            norm.train()
        try:
            yield
        finally:
            for norm, momentum, training in before:
                norm.momentum = momentum
                norm.train(training)
            freeze_batchnorm(self.model)

    @contextmanager
    def _quantizing(self) -> Iterator[None]:
        """Temporarily quantize everything that has a range, unless the user chose what to quantize."""
        if is_pending(self.model):
            raise CalibrationError("the model has not been run yet: call prepare_calibration() and run it on some data")
        found = stepwise.all_quantizers(self.model)
        chosen = any(q.mode for q in found)
        if not chosen:
            self.set_quant(w_quant=True, a_quant=True)
        try:
            yield
        finally:
            if not chosen:
                stepwise.stop(found)
