package proof

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// Report is what came of the proof of a restore.
type Report struct {
	Mended    []string     `json:"mended,omitempty"`
	Different []Difference `json:"different,omitempty"`
}

// reportFile is where in the working directory of a restore its report is.
const reportFile = "proof.json"

// Fatal returns the first difference with which no process may run, or nil.
func (r Report) Fatal() *Difference {
	for i := range r.Different {
		if r.Different[i].Fatal {
			return &r.Different[i]
		}
	}
	return nil
}

// Write puts a report into the working directory of a restore.
func (r Report) Write(dir string) error {
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, reportFile), data, 0o600)
}

// ReadReport reads the report of the last restore with a working directory. Without one
// it is empty.
func ReadReport(dir string) (r Report, err error) {
	data, err := os.ReadFile(filepath.Join(dir, reportFile))
	if errors.Is(err, fs.ErrNotExist) {
		return r, nil
	}
	if err == nil {
		err = json.Unmarshal(data, &r)
	}
	return r, err
}
