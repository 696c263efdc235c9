package wall

// Kinds are the patterns of the names of images that a dump may have, and whether Judge reads them.
func Kinds() map[string]bool {
	list := map[string]bool{}
	for _, k := range kinds() {
		list[k.name.String()] = k.judge != nil
	}
	return list
}
