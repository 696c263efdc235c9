package main

import (
	"fmt"
	"io"
	"time"

	"github.com/agentbox/agentbox/runtime"
)

// printValidators says which validators an apply has passed, or would have to.
func printValidators(out runtime.Applied, to io.Writer) {
	for _, v := range out.Validators {
		text := fmt.Sprintf("validator %q of %s ", v.Name, v.From)
		if v.Exit == nil {
			text += "has to pass"
		} else {
			text += "passed in " + v.Took.Round(time.Millisecond).String()
		}
		fmt.Fprintln(to, printable(text))
	}
}
