"""Benchmarks of whole servers: stock SGLang, its deterministic mode and sgl_det, in turn.

workloads   what is sent            arms      the servers, started side by side, one awake
schedule    the steps and their time  client  how a workload is sent, and what is measured
runner      carries the steps out    stats    medians and paired ratios
verdict     the probe of each arm    results  e2e.json: rows, merged over sittings
thousand    one prompt a thousand times       table, report, plots: for people
verb        ``sgl-det bench``
"""
