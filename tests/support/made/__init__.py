"""Made data: states, replies, results and inputs."""
