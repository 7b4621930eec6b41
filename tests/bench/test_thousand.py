"""The thousand completions against a make-believe server, whose answers may follow the load."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from sgl_det.bench.thousand import Experiment, experiment

E = Experiment(count=40, tokens=5, in_flight=8, background=3, scale=32)


def run(leak: bool = False, refuse_others: bool = False, e: Experiment = E):
    """The experiment, and the most requests that the server had at once."""
    state = {"running": 0, "most": 0}

    async def generate(request):
        body = await request.json()
        if refuse_others and "input_ids" in body:
            return web.json_response({"error": "no room"}, status=503)
        state["running"] += 1
        state["most"] = max(state["most"], state["running"])
        await asyncio.sleep(0.002)
        token = 7 if leak and state["running"] > 4 else 1
        state["running"] -= 1
        n = body["sampling_params"]["max_new_tokens"]
        return web.json_response({"output_ids": [1, 1, token, *[1] * (n - 3)]})

    async def main():
        app = web.Application()
        app.router.add_post("/generate", generate)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            port = runner.addresses[0][1]
            return await experiment(f"http://127.0.0.1:{port}", e)
        finally:
            await runner.cleanup()

    return asyncio.run(main()), state["most"]


def test_a_server_whose_answers_follow_the_load_is_found_out():
    found, most = run(leak=True)
    assert (found["completions"], found["distinct"], found["first_divergence"]) == (40, 2, 2)
    assert 4 < most <= E.in_flight + E.background


def test_a_server_whose_answers_do_not_has_one_completion():
    found, _ = run()
    assert (found["completions"], found["distinct"], found["most_frequent"]) == (40, 1, 40)
    assert found["background_requests"] > 0


def test_a_refused_request_ends_the_experiment():
    with pytest.raises(RuntimeError, match="answered 503, expected 200: .*no room"):
        run(refuse_others=True)


def test_no_wave_begins_after_the_time_is_over():
    with pytest.raises(ValueError, match="give the experiment more seconds"):
        run(e=Experiment(count=40, tokens=5, in_flight=8, background=0, seconds=-1.0))
