"""Grafana: four dashboards as code, and their upload to a server.

    panels      what a panel is, and how it becomes Grafana's JSON
    overview, layers, ranks, itself     one dashboard each: a list of panels
    dashboards  all of them
    push        datasource, folder, dashboards, annotations, over Grafana's HTTP API

deploy/grafana/dashboards holds the resulting JSON, for provisioning from files.
"""
