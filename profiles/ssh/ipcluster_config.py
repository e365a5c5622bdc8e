"""Hosts that one can log in to by ssh without a password: the controller here, one connection and agent per host."""

c = get_config()  # noqa: F821  # given by traitlets

c.Cluster.controller_launcher_class = "nbdist"
c.Cluster.engine_launcher_class = "nbdist.launchers.SSHAgents"
c.Cluster.delay = 0
c.Cluster.send_engines_connection_env = False  # no key in an environment: it goes over ssh, into a private file

# c.SSHAgents.hosts = "gpu1:8,gpu2:8"
# c.SSHAgents.python = "/opt/conda/bin/python"  # where it is not the notebook's own path
# c.SSHAgents.address = "10.0.0.1"  # of this host, where the route to the others does not tell
# c.SSHAgents.ssh_args = ["-F", "/path/to/another/ssh_config"]
# c.SSHAgents.environment = {"NCCL_IB_HCA": "mlx5"}
