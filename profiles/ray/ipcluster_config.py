"""Nodes of a Ray cluster: the controller here (on one of its nodes), one actor per node that holds the ranks' agent."""

c = get_config()  # noqa: F821  # given by traitlets

c.Cluster.controller_launcher_class = "nbdist"
c.Cluster.engine_launcher_class = "nbdist.launchers.RayAgents"
c.Cluster.delay = 0
c.Cluster.send_engines_connection_env = False  # no key in an environment: it goes to the actors in a call of theirs

# c.RayAgents.ray_address = "10.0.0.1:6379"  # else RAY_ADDRESS, else the cluster that this host is part of
# c.RayAgents.nodes = 2
# c.RayAgents.gpus_per_node = 8
# c.RayAgents.cpus_per_rank = 12
# c.RayAgents.resources = {"accelerator_type:H100": 0.01}
# c.RayAgents.grows = True  # Ray adds nodes when they are asked for: wait for them
