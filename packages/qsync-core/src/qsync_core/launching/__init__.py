"""Starting a prepared job: the torchrun of every machine, or a Kubernetes JobSet of all of them."""
