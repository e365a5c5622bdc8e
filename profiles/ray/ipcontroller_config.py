"""The controller of a cluster of several hosts: encrypted, without a task database, quick to register engines."""

c = get_config()  # noqa: F821  # given by traitlets

c.IPController.enable_curve = True
c.IPController.db_class = "ipyparallel.controller.dictdb.NoDB"
c.IPController.broadcast_scheduler_depth = 0
# An engine is registered when its first heart-beat was answered, two periods at worst.
c.HeartMonitor.period = 100
# A stopped (SIGSTOP) rank or one in a long native call is not dead; the nannies tell of those that are.
c.HeartMonitor.max_heartmonitor_misses = 100_000
c.TaskScheduler.scheme_name = "none"
