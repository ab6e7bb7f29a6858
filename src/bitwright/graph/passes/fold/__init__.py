"""What folding into layers is made of: expressions of constants, stand-ins for norms, and layers that fold inputs."""
