"""One machine: the controller and one node agent that forks an engine per rank."""

c = get_config()  # noqa: F821  # given by traitlets

c.Cluster.controller_launcher_class = "nbdist"
c.Cluster.engine_launcher_class = "nbdist"
c.Cluster.delay = 0
c.Cluster.send_engines_connection_env = False  # no key in an environment: engines read the connection file
