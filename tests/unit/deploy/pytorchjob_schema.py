"""A JSON schema of Kubeflow's PyTorchJob, made from the models of the published package `kubeflow-training`.

The models are generated from the training operator's API. They are read as text: importing them would
import a client of Kubernetes.
"""

from __future__ import annotations

import ast
import re
from importlib.metadata import files

PLAIN = {
    "str": {"type": "string"},
    "int": {"type": "integer"},
    "bool": {"type": "boolean"},
    "datetime": {"type": "string"},
    "object": {},
}


def schema_of(model, foreign):
    """Other properties than a model's are refused; `foreign(name)` gives the schemas of Kubernetes."""
    models = _models()

    def of(kind):
        if listed := re.fullmatch(r"list\[(.+)\]", kind):
            return {"type": "array", "items": of(listed[1])}
        if mapped := re.fullmatch(r"dict\(str, (.+)\)", kind):
            return {"type": "object", "additionalProperties": of(mapped[1])}
        if kind in PLAIN:
            return PLAIN[kind]
        return made(kind) if kind in models else foreign(kind)

    def made(name):
        types, keys, required = models[name]
        return {
            "type": "object",
            "properties": {keys[attribute]: of(kind) for attribute, kind in types.items()},
            "required": [keys[attribute] for attribute in required],
            "additionalProperties": False,
        }

    return made(model)


def _models():
    found = {}
    for path in files("kubeflow-training") or ():
        if path.parent.name == "models" and path.name.startswith("kubeflow_org_v1_"):
            for node in ast.parse(path.read_text("utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    found[node.name] = _model(node)
    return found


def _model(tree):
    tables = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    }
    # A setter that refuses None belongs to a required property.
    required = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and "must not be `None`" in ast.unparse(node)
    }
    return tables["openapi_types"], tables["attribute_map"], required & set(tables["openapi_types"])
