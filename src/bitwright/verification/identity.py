"""Identity: a file is compared only with the very model that it was exported from."""

from torch import nn

from bitwright.errors import VerifyError
from bitwright.exporting import FORMATS, ExportRecord, LoadedFile
from bitwright.exporting.deploy import deploy, float_twin
from bitwright.exporting.fingerprint import fingerprint


def check_identity(model: nn.Module, file: LoadedFile) -> ExportRecord:
    """Return the record of a file that was exported from this model in its current state, or refuse the file."""
    record, path = file.record, str(file.path)
    if record is None:
        raise VerifyError(
            f"{path!r} was not written by Bitwright: it has no record; verify takes files that bitwright.export wrote"
        )
    clean = record.format in FORMATS and FORMATS.get(record.format).clean
    twin = deploy(model, clean=clean) if record.quantized else float_twin(model)
    ours, theirs = fingerprint(twin.model), record.fingerprint
    different = ours.differences(theirs)
    if not different:
        return record
    name = model.__class__.__name__
    both = f"the file has the fingerprint {theirs.short}, the model {ours.short}"
    if "structure" in different or record.model != name:
        raise VerifyError(
            f"{path!r} was exported from another model: from {record.model}, and this {name} differs from it in "
            f"{' and '.join(different)}; {both}"
        )
    raise VerifyError(
        f"the model has changed since it was exported as {path!r}: its {' and '.join(different)} differ; {both}; "
        "export again"
    )
