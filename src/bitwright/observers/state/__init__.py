"""What observers keep of the tensors they see: histograms, moments and rows of channels."""
