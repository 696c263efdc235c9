package session_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api"
	"github.com/agentbox/agentbox/runtime/session"
)

// A risky step is tried, and taken back.
func Example() {
	work := func(ctx context.Context) (err error) {
		svc := api.Dial("/run/agentbox/agentbox.sock")
		defer svc.Close()
		s := session.New(svc)
		defer func() { err = errors.Join(err, s.Close(ctx)) }()
		sb, err := s.Run(ctx, runtime.CreateRequest{Spec: runtime.Spec{
			Image: "busybox", Args: []string{"sleep", "1000"},
		}})
		if err != nil {
			return err
		}
		if _, err := s.Checkpoint(ctx, sb.ID, false, runtime.CheckpointOptions{Trigger: "before-step"}); err != nil {
			return err
		}
		exit, err := svc.Exec(ctx, sb.ID, runtime.Process{Args: []string{"rm", "-r", "/etc"}}, runtime.Streams{})
		if err != nil {
			return err
		}
		fmt.Println("the step ended with", exit)
		_, err = svc.Restore(ctx, sb.ID, runtime.RestoreOptions{Trigger: "before-step"})
		return err
	}
	fmt.Println(work(context.Background()))
}
