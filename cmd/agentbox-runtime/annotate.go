package main

import (
	"encoding/json"
	"fmt"
	"os"
)

// criuConfig is the annotation from which runc and crun take CRIU's configuration file.
const criuConfig = "org.criu.config"

// annotate names CRIU's configuration file in a bundle. All else in the
// bundle's config.json is kept as it is.
func annotate(path, file string) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var spec map[string]json.RawMessage
	if err := json.Unmarshal(data, &spec); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	annotations := map[string]string{}
	if raw, ok := spec["annotations"]; ok {
		if err := json.Unmarshal(raw, &annotations); err != nil {
			return fmt.Errorf("%s: annotations: %w", path, err)
		}
	}
	if annotations[criuConfig] == file {
		return nil
	}
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[criuConfig] = file
	if spec["annotations"], err = json.Marshal(annotations); err != nil {
		return err
	}
	if data, err = json.Marshal(spec); err != nil {
		return err
	}
	st, err := os.Stat(path)
	if err != nil {
		return err
	}
	tmp := path + ".agentbox"
	if err := os.WriteFile(tmp, data, st.Mode().Perm()); err != nil {
		return err
	}
	if err := os.Rename(tmp, path); err != nil {
		_ = os.Remove(tmp)
		return err
	}
	return nil
}
