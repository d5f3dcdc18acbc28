"""Ray Serve deployments: the Front that speaks HTTP, the request router, the engine replica."""
