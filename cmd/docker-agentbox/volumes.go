package main

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/audit"
	pluginvolume "github.com/agentbox/agentbox/runtime/dockerplugin/volume"
	"github.com/agentbox/agentbox/runtime/volume"
)

// volumeHandler answers dockerd's calls about volumes, once what killed processes have left of
// them is cleared up.
func volumeHandler(ctx context.Context, root string) (http.Handler, error) {
	program, err := agentbox()
	if err != nil {
		return nil, err
	}
	lasting, transient := runtime.Dirs(root)
	recover := func(ctx context.Context) error { return recoverVerbs(ctx, program, lasting) }
	v, err := volume.Open(volume.Options{Root: lasting, Run: transient, Recover: recover})
	if err != nil {
		return nil, err
	}
	if err := recover(ctx); err != nil {
		return nil, err
	}
	return pluginvolume.Handler(volume.Record(v, audit.Open(lasting), "docker-plugin"), nil), v.Sweep(ctx)
}

// recoverVerbs finishes or takes back what a killed agentbox has left of its verbs: every
// command of agentbox does so first. It is not left to the service, which may be what was
// killed.
func recoverVerbs(ctx context.Context, program, root string) error {
	cmd := exec.CommandContext(ctx, program, "--root", root, "ps", "--quiet")
	cmd.Env = append(os.Environ(), "AGENTBOX_HOST=none", "AGENTBOX_BACKEND=oci")
	var said bytes.Buffer
	cmd.Stderr = &said
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("recover interrupted verbs: %w: %s", err, bytes.TrimSpace(said.Bytes()))
	}
	return nil
}
