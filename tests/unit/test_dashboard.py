"""Every metric that the dashboard draws is declared, and every metric of Shoal's that is declared is drawn."""

from __future__ import annotations

import json
import re

import yaml
from shoal.project import project_root


def declared():
    config = yaml.safe_load((project_root() / "handler" / "metrics.yaml").read_text(encoding="utf-8"))
    return {
        metric["name"]: (kind, metric["dimensions"])
        for section in ("ts_metrics", "model_metrics")
        for kind, metrics in config[section].items()
        for metric in metrics
    }


def test_the_dashboard_draws_what_is_declared():
    dashboard = json.loads((project_root() / "deploy" / "grafana-dashboard.json").read_text(encoding="utf-8"))
    metrics, drawn = declared(), set()
    for panel in dashboard["panels"]:
        assert panel["title"] and panel["targets"]
        for target in panel["targets"]:
            names = re.findall(r"\b(shoal_\w+|Requests\dXX)\b", target["expr"])
            assert len(names) == 1, target
            name = names[0].removesuffix("_bucket")
            kind, dimensions = metrics[name]
            assert ("rate(" in target["expr"] or "increase(" in target["expr"]) == (kind != "gauge"), target
            assert names[0].endswith("_bucket") == (kind == "histogram")
            grouped = re.search(r"by \(([^)]*)\)", target["expr"])
            labels = set(grouped[1].split(", ")) - {"le"} if grouped else set()
            assert labels <= set(dimensions), target
            drawn.add(name)
    assert {name for name in metrics if name.startswith("shoal_")} - drawn == {"shoal_cache_hits_total"}


def test_places_do_not_overlap():
    dashboard = json.loads((project_root() / "deploy" / "grafana-dashboard.json").read_text(encoding="utf-8"))
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    assert len({(p["x"], p["y"]) for p in places}) == len(places) and all(p["x"] + p["w"] <= 24 for p in places)


def test_prometheus_looks_where_the_server_tells():
    config = yaml.safe_load((project_root() / "deploy" / "prometheus.yml").read_text(encoding="utf-8"))
    (target,) = config["scrape_configs"][0]["static_configs"][0]["targets"]
    assert f"metrics_address=http://{target}" in (project_root() / "config.properties").read_text(encoding="utf-8")
