"""Save a prepared model as a folder of plain files, and rebuild the same model from it in any process."""

from bitwright.saving.reading import load
from bitwright.saving.writing import save

__all__ = ["load", "save"]
