"""Programs of ``torch.export`` with torch's own quantizers: how they are built, kept in a file, and read."""
