"""JSON schemas of Kubeflow Trainer's API, from the models of the published package `kubeflow-trainer-api`.

The models are generated from that API. They leave out what they do not know; the schemas refuse it.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

# Wrappers of the generator's around what may be a text or a number.
_SCALARS = ("IoK8sApimachineryPkgApiResourceQuantity", "IoK8sApimachineryPkgUtilIntstrIntOrString")


def schema_of(kind: str) -> dict[str, Any]:
    """Return the schema of `TrainJob` or `TrainingRuntime`, in its version v1alpha1."""
    module = "trainer_v1alpha1_" + re.sub(r"(?<!^)([A-Z])", r"_\1", kind).lower()
    models = importlib.import_module(f"kubeflow_trainer_api.models.{module}")
    schema: dict[str, Any] = getattr(models, f"TrainerV1alpha1{kind}").model_json_schema(by_alias=True)
    for model in (schema, *schema["$defs"].values()):
        if "properties" in model:
            model["additionalProperties"] = False
    for name in _SCALARS:
        schema["$defs"][name] = {"type": ["string", "number"]}
    return schema
