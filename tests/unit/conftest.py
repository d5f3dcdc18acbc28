"""Property tests: no deadline per example, since other work on the machine must not turn a right answer into a failure."""

from hypothesis import HealthCheck, settings

settings.register_profile("orthrus", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("orthrus")
