"""Grafana: four dashboards as code, and what puts them there.

    panels      what a panel is, and how it becomes Grafana's JSON
    overview, layers, ranks, itself     one dashboard each: a list of panels
    dashboards  all of them
    push        datasource, folder, dashboards, annotations, over Grafana's HTTP API

deploy/grafana/dashboards holds what comes out, for provisioning from files.
"""
