"""SGLang's offline Engine through ``sgl_det.Engine``: same bits as the server, same checks."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import requests

from support import CPU

pytestmark = pytest.mark.server
SCRIPT = """
import json, os, sys
import sgl_det

def main():
    settings = dict(model_path=sys.argv[1], max_total_tokens=32768, chunked_prefill_size=256,
                    max_running_requests=64, dtype="float32", sleep_on_idle=True)
    try:
        sgl_det.Engine(**settings, enable_mixed_chunk=True)
        refused = None
    except RuntimeError as error:
        refused = str(error)
    engine = sgl_det.Engine(**settings)
    assert "SGL_DET_CONFIG" not in os.environ
    prompts = [[(i * j + 3) % 256 for j in range(20 + 9 * i)] for i in range(1, 9)]
    answers = engine.generate(
        input_ids=prompts, return_logprob=True,
        sampling_params={"temperature": 0, "max_new_tokens": 16, "ignore_eos": True})
    found = [[[x[1], float(x[0]).hex()] for x in a["meta_info"]["output_token_logprobs"]]
             for a in answers]
    print("RESULT", json.dumps({"refused": refused, "found": found, "prompts": prompts,
                                "determinism": engine.determinism()}))
    engine.shutdown()

if __name__ == "__main__":
    main()
"""


def test_engine_equals_server(demo_model, sgl_det_server, tmp_path):
    script = tmp_path / "use_engine.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(demo_model)],
        capture_output=True,
        text=True,
        env={**os.environ, **CPU},
        timeout=400,
    )
    lines = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
    assert lines, (done.stdout + done.stderr)[-4000:]
    result = json.loads(lines[0].removeprefix("RESULT "))
    assert "mixed" in result["refused"]
    server = requests.get(f"{sgl_det_server.url}/determinism", timeout=60).json()
    assert result["determinism"]["key"] == server["key"]
    for prompt, found in zip(result["prompts"], result["found"], strict=True):
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True},
            "return_logprob": True,
        }
        answer = requests.post(f"{sgl_det_server.url}/generate", json=body, timeout=120).json()
        alone = answer["meta_info"]["output_token_logprobs"]
        assert [[x[1], float(x[0]).hex()] for x in alone] == found
