"""BackendType: the targets by the names MQBench gave them."""

from enum import Enum

from bitwright.errors import ConfigError, UnknownNameError, suggest


class BackendType(Enum):
    """A target; the value is its name among Bitwright's backends."""

    Academic = "academic"
    Tensorrt = "tensorrt"
    SNPE = "snpe"
    PPLW8A16 = "pplw8a16"
    NNIE = "nnie"
    Vitis = "vitis"
    ONNX_QNN = "onnx_qnn"
    PPLCUDA = "pplcuda"
    OPENVINO = "openvino"
    Tengine_u8 = "tengine_u8"
    Tensorrt_NLP = "tensorrt_nlp"
    Academic_NLP = "academic_nlp"
    QDQ = "qdq"
    STPU = "stpu"

    @classmethod
    def read(cls, given: object) -> "BackendType":
        """A member, or the one of that name in whatever case."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, str):
            raise ConfigError(f"the backend must be a BackendType or its name, not {given!r}")
        for member in cls:
            if given.removeprefix("BackendType.").lower() == member.value:
                return member
        raise UnknownNameError(f"unknown BackendType {given!r}{suggest(given, cls.__members__)}")
