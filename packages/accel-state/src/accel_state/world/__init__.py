"""The processes of a run: topology, process group, and the clusters that start them."""
