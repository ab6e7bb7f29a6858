"""The accuracy benchmark: what few bits cost on Fashion-MNIST, method by method."""
