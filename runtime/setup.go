package runtime

// Setup is what a sandbox has over its image from the start. It is the sandbox's own, as all that
// changes in it later, and in its first checkpoint. The image stays as it is.
type Setup struct {
	// Account is a user that the sandbox knows; nil: none but the image's.
	Account *Account `json:"account"`
	// Files take the place of what the image has under their paths.
	Files []SetupFile `json:"files"`
}

// Account is a user with entries in /etc/passwd and /etc/group and a home directory. What the
// image, or a workspace, has of these stays as it is. A name that the image gives to another id
// gets the id as its end.
type Account struct {
	Name   string         `json:"name"`
	UID    uint32         `json:"uid"`
	Groups []AccountGroup `json:"groups"` // the first is the primary one
	Home   string         `json:"home"`   // absolute
}

// AccountGroup is a group of an account.
type AccountGroup struct {
	Name string `json:"name"`
	GID  uint32 `json:"gid"`
}

// SetupFile is a regular file of root's.
type SetupFile struct {
	Path string `json:"path"` // absolute
	Mode uint32 `json:"mode"` // permission bits
	Data []byte `json:"data"`
}
