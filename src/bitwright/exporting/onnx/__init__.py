"""The parts of the ONNX format; they need the extra ``onnx``, and are imported when it is used."""
