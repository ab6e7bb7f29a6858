"""The line of another program's error that is shown to users."""

import pytest

from bitwright.errors import useful_line

CONVERSION = """Exception from src/inference/src/cpp/core.cpp:105:
Check 'false' failed at src/frontends/common_translators/src/unconverted_ops_report.cpp:151:
FrontEnd API failed with OpConversionFailure:
Model wasn't fully converted. Failed operations detailed log:
-- Conv-18 with a message:
While validating ONNX node '<Node(Conv): stem>': Check 'data_rank.is_dynamic()' failed at src/convolution.hpp:307:
While validating node 'opset1::Convolution Convolution_18 () -> ()' with friendly_name 'Convolution_18':
Data batch channel count (3) does not match filter input channel count (5).

Summary:
-- Conversion is failed for: Conv-18
"""
MESSAGES = {
    CONVERSION: "stem (Conv): Data batch channel count (3) does not match filter input channel count (5).",
    "Model wasn't fully converted.\nSummary:\n-- No conversion rule found for operations: a.Foo\n": (
        "No conversion rule found for operations: a.Foo"
    ),
    "[ONNXRuntimeError] : Got invalid dimensions for input: x for the following indices\n index: 1 Got: 5 Expected: 3\n"
    " Please fix the inputs.": (
        "[ONNXRuntimeError] : Got invalid dimensions for input: x for the following indices index: 1 Got: 5 Expected: 3"
    ),
    "backend='inductor' raised:\nRuntimeError: could not create a primitive\n\nOriginal traceback:\nNone": (
        "RuntimeError: could not create a primitive"
    ),
    "Exception from src/core.cpp:1:": "Exception from src/core.cpp:1:",
    "": "RuntimeError",
}


@pytest.mark.parametrize("message", MESSAGES)
def test_useful_line(message: str) -> None:
    assert useful_line(RuntimeError(message)) == MESSAGES[message]
