package host

import (
	"os"

	"github.com/agentbox/agentbox/internal/fsx"
)

// Replace publishes data in place of a file, whose owner and mode it keeps. It is not
// fsynced: process images are laid out for one restore, and none goes on after a power cut.
func Replace(path string, data []byte) error {
	st, err := os.Lstat(path)
	if err != nil {
		return err
	}
	return fsx.Write(path, data, fsx.Options{Like: st, Temp: path + ".new", Volatile: true})
}
