"""Pods: the controller here (in a pod of the same network), one Indexed Job whose pods hold the ranks."""

c = get_config()  # noqa: F821  # given by traitlets

c.Cluster.controller_launcher_class = "nbdist"
c.Cluster.engine_launcher_class = "nbdist.launchers.KubernetesAgents"
c.Cluster.delay = 0
c.Cluster.send_engines_connection_env = False  # no key in an environment: it is in a Secret, mounted as a file

# c.KubernetesAgents.image = "registry.example/nbdist:1"
# c.KubernetesAgents.nodes = 2
# c.KubernetesAgents.gpus_per_node = 8
# c.KubernetesAgents.namespace = "research"
# c.KubernetesAgents.notebook_labels = {"app": "jupyter"}
# c.KubernetesAgents.pod = {"nodeSelector": {"gpu": "h100"}, "imagePullSecrets": [{"name": "registry"}]}
# c.KubernetesAgents.container = {"env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}
# c.KubernetesAgents.context = "cluster-of-the-lab"  # else the current one of KUBECONFIG
