"""A Slurm job: the controller here (a login node), one sbatch job that holds all ranks."""

c = get_config()  # noqa: F821  # given by traitlets

c.Cluster.controller_launcher_class = "nbdist"
c.Cluster.engine_launcher_class = "nbdist.launchers.SlurmAgents"
c.Cluster.delay = 0
c.Cluster.send_engines_connection_env = False  # no key in an environment

# c.SlurmAgents.nodes = 4
# c.SlurmAgents.gpus_per_node = 8
# c.SlurmAgents.cpus_per_rank = 12
# c.SlurmAgents.partition = "gpu"
# c.SlurmAgents.account = "project"
# c.SlurmAgents.time = "4:00:00"
# c.SlurmAgents.extra = ["--constraint=a100", "--exclusive"]
# c.SlurmAgents.notice = 120  # seconds before the time limit at which the notebook is told
