package wall

// Kinds are the patterns of the names of images that a dump may have, and whether Judge reads them.
func Kinds() map[string]bool {
	list := map[string]bool{}
	for _, k := range kinds() {
		list[k.name.String()] = k.judge != nil
	}
	return list
}

// Calls are the system calls by entry, with their numbers.
func Calls() map[string]map[uint32]string {
	list := map[string]map[uint32]string{}
	for _, e := range entries() {
		list[e.name] = e.calls
	}
	return list
}
