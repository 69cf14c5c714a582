"""mini-swe-agent in its shell: `python mini_swe.py BASE_URL MODEL TASK`."""

from __future__ import annotations

import os
import sys

os.environ.update(LITELLM_LOCAL_MODEL_COST_MAP="True", MSWEA_SILENT_STARTUP="1")

import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import builtin_config_dir
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

base_url, name, task = sys.argv[1:]
config = yaml.safe_load((builtin_config_dir / "mini.yaml").read_text())
shipped = config["model"].get("model_kwargs", {})
model = LitellmModel(
    model_name=f"openai/{name}",
    model_kwargs={**shipped, "api_base": base_url, "api_key": "any"},
    cost_tracking="ignore_errors",
)
prompts = {kind: config["agent"][kind] for kind in ("system_template", "instance_template")}
ended = DefaultAgent(model, LocalEnvironment(), step_limit=6, **prompts).run(task)
assert ended["exit_status"] == "Submitted", ended
print(ended["submission"])
