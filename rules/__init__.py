"""The stock rules, one YAML file a topic, each with its tests beside it."""
