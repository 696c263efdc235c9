//go:build !amd64

package wall

// calls are not known by their numbers here; that each thread has a filter is.
var calls []call
