"""``prepare_qat_fx_by_platform``: the first name of ``prepare_by_platform``."""

from bitwright.compat.mqbench.backend_type import BackendType as BackendType
from bitwright.compat.mqbench.prepare_by_platform import prepare_qat_fx_by_platform as prepare_qat_fx_by_platform
