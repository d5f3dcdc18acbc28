"""The demo model: fetched from package registries, its embedding adapter, and how that adapter is trained."""
