"""Hosts that mpiexec reaches: the controller here, one agent per host, started by Open MPI."""

c = get_config()  # noqa: F821  # given by traitlets

c.Cluster.controller_launcher_class = "nbdist"
c.Cluster.engine_launcher_class = "nbdist.launchers.MPIAgents"
c.Cluster.delay = 0
c.Cluster.send_engines_connection_env = False  # no key in an environment: it goes through mpiexec's standard input

# c.MPIAgents.hosts = "gpu1:8,gpu2:8"
# c.MPIAgents.mpi_cmd = ["mpiexec"]
