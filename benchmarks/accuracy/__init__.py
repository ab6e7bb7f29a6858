"""The accuracy benchmark: what low bit widths cost on Fashion-MNIST, by method."""
