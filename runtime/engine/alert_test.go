package engine

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/runtime"
)

// TestAlertKey: the key of an alert is the content of its file without one end of line.
func TestAlertKey(t *testing.T) {
	key := "0123456789abcdef"
	long := strings.Repeat("k", maxAlertSecret)
	for in, want := range map[string]string{
		key:               key,
		key + "\n":        key,
		key + "\r\n":      key,
		key + "\n\n":      key + "\n",
		key + "\r":        key + "\r",
		key + "\r\r\n":    key + "\r",
		key + " \n":       key + " ",
		"\n" + key:        "\n" + key,
		key[:15] + "\n":   "",
		key[:15] + "\n\n": key[:15] + "\n",
		long + "\r\n":     long,
		long + "k\n":      "",
		"":                "",
	} {
		file := filepath.Join(t.TempDir(), "key")
		if err := os.WriteFile(file, []byte(in), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := alertKey(file)
		if want == "" && !errors.Is(err, runtime.ErrInvalid) || want != "" && (err != nil || string(got) != want) {
			t.Errorf("%.40q: %.40q, %v; want %.40q", in, got, err, want)
		}
	}
}
