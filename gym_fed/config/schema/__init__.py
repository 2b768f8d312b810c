"""What all schemas share: the base class, members of registries as values, keys that members add.

Neighbours: imports yaml; imported by algorithms, content_filter, delta, hub, llamafactory, predict, serving,
train, yaml.
"""
