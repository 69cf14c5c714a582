"""The kernels of `paged_attention` as `shared_prefix` launches them, compiled ahead of time."""

from __future__ import annotations

from build_paged_attention import LLAMA, SMOLLM2, Form, reading

from magnitude_kernels.paged_attention.triton import ALL

GROUPS = tuple(Form(run, ALL, shared=True) for run in ("short", "prefill"))
EACH = Form("decode", shared=True)

BUILDS = (*reading(LLAMA, *GROUPS, EACH), *reading(SMOLLM2, *GROUPS, EACH))
