package oci

// cgroupParent holds one cgroup per container, named by its id, and one,
// "conmon", for the monitors. Ids are random, so that installations with other
// roots do not collide; for the same reason no one may take a cgroup found
// here for his own.
const cgroupParent = "/agentbox"

func cgroupPath(id string) string { return cgroupParent + "/" + id }

// monitors is the cgroup of all conmons.
const monitors = cgroupParent + "/conmon"
