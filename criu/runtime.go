package criu

// Runtime names one container of an OCI runtime (runc or crun).
type Runtime struct {
	Binary string `json:"binary"` // e.g. /usr/sbin/runc
	Root   string `json:"root"`   // its --root
	ID     string `json:"id"`
}
