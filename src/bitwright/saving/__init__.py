"""Save a prepared model as a folder of plain files, and make the same model of it again, in any process."""

from bitwright.saving.reading import load
from bitwright.saving.writing import save

__all__ = ["load", "save"]
