"""Our list of the keys of a Serve file is Ray's."""

import typing
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel
from ray.serve import schema
from ray.serve.config import AutoscalingConfig, BackpressureConfig, ControllerOptions

from orthrus_serve.config import serve_keys
from orthrus_serve.config.load import PROXY_LOCATIONS


@pytest.mark.parametrize(
    ("keys", "model"),
    [
        (serve_keys.SERVE_FILE, schema.ServeDeploySchema),
        (serve_keys.SERVE_FILE["http_options"], schema.HTTPOptionsSchema),
        (serve_keys.SERVE_FILE["grpc_options"], schema.gRPCOptionsSchema),
        (serve_keys.SERVE_FILE["controller_options"], ControllerOptions),
        (serve_keys.APPLICATION, schema.ServeApplicationSchema),
        (serve_keys.DEPLOYMENT, schema.DeploymentSchema),
        (serve_keys.DEPLOYMENT["ray_actor_options"], schema.RayActorOptionsSchema),
        (serve_keys.DEPLOYMENT["backpressure_config"], BackpressureConfig),
        (serve_keys.DEPLOYMENT["autoscaling_config"], AutoscalingConfig),
        (serve_keys.LOGGING, schema.LoggingConfig),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "keys",
)
def test_the_keys_are_those_of_rays_schema(keys, model):
    assert set(keys) == set(model.model_fields)


def test_no_section_of_rays_schema_is_left_undescribed():
    # A section that is free in our list must be free, or strict by itself, in Ray.
    for keys, model in (
        (serve_keys.SERVE_FILE, schema.ServeDeploySchema),
        (serve_keys.DEPLOYMENT, schema.DeploymentSchema),
    ):
        for name, field in model.model_fields.items():
            for kind in (field.annotation, *typing.get_args(field.annotation)):
                if isinstance(kind, type) and issubclass(kind, BaseModel) and keys[name] is None:
                    is_strict = kind.model_config.get("extra") == "forbid"
                    assert is_strict or name in {
                        "request_router_config",
                        "autoscaling_config",
                        "gang_scheduling_config",
                    }, name


def test_the_places_of_the_proxy_are_rays():
    assert set(PROXY_LOCATIONS) == {place.value for place in schema.ProxyLocation}


@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parents[2] / "configs").glob("*.yaml")), ids=lambda file: file.name
)
def test_ray_accepts_every_configuration(file):
    schema.ServeDeploySchema.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
