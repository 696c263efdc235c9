package crlog

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/agentbox/agentbox/internal/fsx"
)

// Failure is a restore that failed, as the OCI runtime wrapper leaves it in the
// restore's work directory for the engine: on the way between them are programs
// that make one string of all they are told.
type Failure struct {
	Diagnosis
	Log string `json:"log,omitempty"` // CRIU's log; empty when CRIU was not reached
}

const failureFile = "failure.json"

// Write leaves the failure in dir, in place of an earlier one.
func (f Failure) Write(dir string) error {
	data, err := json.Marshal(f)
	if err != nil {
		return err
	}
	return fsx.Write(filepath.Join(dir, failureFile), data, fsx.Options{Volatile: true})
}

// ReadFailure returns the failure in dir.
func ReadFailure(dir string) (f Failure, err error) {
	data, err := os.ReadFile(filepath.Join(dir, failureFile))
	if err == nil {
		err = json.Unmarshal(data, &f)
	}
	return f, err
}

// ClearFailure removes the failure in dir, if there is one.
func ClearFailure(dir string) error {
	err := os.Remove(filepath.Join(dir, failureFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
