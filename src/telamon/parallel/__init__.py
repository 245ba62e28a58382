"""Where arrays live: the mesh, the rules from logical axes to mesh axes, and process start-up."""
